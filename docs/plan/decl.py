# full token stream with punctuation, declaration index
import os,re,pickle
root=os.getcwd()
rx=re.compile(r'''(?P<ws>\s+)|(?P<com>//[^\n]*)|(?P<blk>/\*.*?\*/)|(?P<raw>\b(?:br|r|cr)(?P<h>\#*)".*?"(?P=h))|(?P<str>\b[bc]?"(?:\\.|[^"\\])*"|"(?:\\.|[^"\\])*")|(?P<chr>b?'(?:\\[^']*|[^'\\])')|(?P<life>'[A-Za-z_]\w*)|(?P<id>(?:r\#)?[A-Za-z_]\w*)|(?P<num>\d[\w.]*)|(?P<p>::|->|=>|\.\.=?|[{}()\[\]<>;:,.#!&|?=+\-*/%^@$~])|(?P<o>.)''',re.S|re.X)
def toks(s):
    out=[];line=1
    for m in rx.finditer(s):
        k=m.lastgroup if m.lastgroup!='h' else 'raw'
        t=m.group(0)
        if k!='ws': out.append((k,t,line,m.start()))
        line+=t.count('\n')
    return out
if __name__=='__main__':
    T={};D=[]
    for base in ('crates','xtask','examples','fuzz','bench'):
        for d,ds,fs in os.walk(os.path.join(root,base)):
            if 'target' in d.split('/'): continue
            for f in fs:
                if not f.endswith('.rs'): continue
                p=os.path.join(d,f);rel=os.path.relpath(p,root)
                t=toks(open(p).read());T[rel]=t
                c=[x for x in t if x[0] not in('com','blk')]
                n=len(c);i=0
                def vis(i):
                    j=i-1
                    while j>=0 and c[j][1] in('const','async','unsafe','extern','default') or (j>=0 and c[j][0]=='str'): j-=1
                    if j>=0 and c[j][1]==')':
                        while j>=0 and c[j][1]!='(': j-=1
                        if c[j-1][1]=='pub': return 'pub('+c[j+1][1]+')'
                        return 'priv'
                    if j>=0 and c[j][1]=='pub': return 'pub'
                    return 'priv'
                cur=None
                while i<n:
                    k,x,l,_=c[i]
                    if k=='id' and x in('struct','enum','trait','type','fn','mod','union','const','static') and i+1<n and c[i+1][0]=='id':
                        if x=='const' and c[i+1][1] in('fn','unsafe','async'): i+=1;continue
                        name=c[i+1][1]
                        D.append((rel,l,vis(i),x,name,''))
                        if x in('struct','enum'):
                            j=i+2
                            # skip generics/where until { or ( or ;
                            depth=0
                            while j<n and not (depth==0 and c[j][1] in('{','(',';')):
                                if c[j][1]=='<': depth+=1
                                elif c[j][1]=='>' : depth-=1
                                j+=1
                            if j<n and c[j][1]=='{':
                                d0=1;j+=1;exp=True
                                while j<n and d0>0:
                                    y=c[j][1]
                                    if y in '{([' : d0+=1
                                    elif y in '})]': d0-=1
                                    elif x=='struct' and d0==1 and c[j][0]=='id' and c[j+1][1]==':' and c[j-1][1] in('{',',','pub',')',']'):
                                        D.append((rel,c[j][2],vis(j),'field',y,name))
                                    elif x=='enum' and d0==1 and c[j][0]=='id' and c[j-1][1] in('{',',',']'):
                                        D.append((rel,c[j][2],'pub','variant',y,name))
                                    elif x=='enum' and d0==2 and c[j][0]=='id' and c[j+1][1]==':' and c[j-1][1] in('{',',',']'):
                                        D.append((rel,c[j][2],'pub','vfield',y,name))
                                    j+=1
                                i=j;continue
                    elif k=='id' and x in('let','ref','mut') and i+1<n and c[i+1][0]=='id':
                        D.append((rel,l,'','let',c[i+1][1],''))
                    elif k=='id' and i+1<n and c[i+1][1]==':' and i>0 and c[i-1][1] in('(',',','mut') and (i+2<n and c[i+2][1]!=':'):
                        D.append((rel,l,'','param',x,''))
                    i+=1
    pickle.dump((T,D),open('decl.pkl','wb'))
    print(len(T),len(D))
